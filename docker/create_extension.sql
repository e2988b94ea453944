-- The owner of the schema cannot log in. Workers and applications log in as app, which may call functions alone.
\getenv password APP_PASSWORD
CREATE ROLE awa_owner NOLOGIN;
CREATE ROLE app LOGIN PASSWORD :'password';
CREATE EXTENSION awa;
SELECT awa.set_owner('awa_owner');
SELECT awa.grant_producer('app'), awa.grant_worker('app');
