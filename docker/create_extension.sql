-- The owner of the schema cannot log in; roles that use it get rights by awa.grant_worker() and the like.
CREATE ROLE awa_owner NOLOGIN;
CREATE EXTENSION awa;
SELECT awa.set_owner('awa_owner');
