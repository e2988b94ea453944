-- Settings: defaults are code, overrides are rows.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT is_empty($$ SELECT s.name FROM awa.settings s WHERE s.value IS DISTINCT FROM s.default_value $$,
    'a fresh install has the defaults');
SELECT is_empty($$
    SELECT d.name FROM awa._setting_definitions() d WHERE d.default_value::numeric NOT BETWEEN d.minimum AND d.maximum
    OR '' IN (d.unit, d.description)
$$, 'every default lies within its bounds and is described');

SELECT is((SELECT s.value FROM awa.settings s WHERE s.name = 'args_max_bytes'), '1048576', 'args may have 1 MiB');
SELECT lives_ok($$ SELECT awa.set_setting('staleness_seconds', '30') $$, 'a setting can be changed');
SELECT results_eq($$ SELECT s.value, s.default_value FROM awa.settings s WHERE s.name = 'staleness_seconds' $$,
    $$ VALUES ('30', '90') $$,
    'the view shows the override beside the default');
SELECT is(awa._setting('staleness_seconds'), 30::numeric, 'the engine reads the override');
SELECT lives_ok($$ SELECT awa.set_setting('staleness_seconds', '0.5') $$, 'a second change replaces the first');
SELECT is(awa._setting('staleness_seconds'), 0.5, 'fractions of seconds are settings too');
SELECT lives_ok($$ SELECT awa.set_setting('staleness_seconds', NULL) $$, 'NULL restores the default');
SELECT is(awa._setting('staleness_seconds'), 90::numeric, 'the default is back');
SELECT is_empty($$ SELECT FROM awa.setting_overrides $$, 'a default costs no row');

SELECT test.refuses($$ SELECT awa.set_setting('stalenes', '1') $$,
    '42704', 'field "name"%stalenes%', 'an unknown setting is refused');
SELECT test.refuses($$ SELECT awa.set_setting(NULL, '1') $$, '42704', '%NULL%', 'a setting without a name is refused');
SELECT test.refuses(format('SELECT awa.set_setting(''rescue_rows'', %L)', v.bad), '22023', 'field "value" of setting "rescue_rows"%', format('the value %L is refused', left(v.bad, 20)))
FROM (VALUES ('0'), ('-1'), ('100001'), ('abc'), (''), ('NaN'), ('Infinity'), ('1e3'), (' 5'), ('5;--'), (repeat('9', 400))) v (bad);
SELECT test.refuses($$ SELECT awa.set_setting('args_max_bytes', '67108865') $$,
    '22023', '%args_max_bytes%', 'args are never larger than 64 MiB');

SELECT is(awa._setting('no_such'), NULL, 'the engine reads NULL for an unknown name');

SELECT * FROM finish();
