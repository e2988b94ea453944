-- Settings that differ from their defaults. Written by set_setting(); the defaults are code (settings.sql).
CREATE TABLE @extschema@.setting_overrides (
    name  text NOT NULL,
    value text NOT NULL,
    CONSTRAINT setting_overrides_pkey PRIMARY KEY (name)
);
COMMENT ON TABLE @extschema@.setting_overrides IS 'Settings that differ from their defaults.';
SELECT @extschema@._mark_for_dump('@extschema@.setting_overrides');
