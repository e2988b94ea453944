# Prints the call that registers an install script with pg_tle: awk -f wrap_pgtle.awk CONTROL SCRIPT. Name, version and
# comment come from the control file, whose values are literals as SQL has them. The script's text is not changed.
BEGIN { tag = "$_awa_$" }
FNR == NR {
    if (match($0, /^(comment|default_version) = '.*'$/)) value[$1] = substr($0, index($0, "'"))
    next
}
FNR == 1 {
    if (!value["comment"] || !value["default_version"]) fail("no comment or default_version in the control file")
    print "-- Registers the extension with pg_tle. Then: CREATE SCHEMA awa; CREATE EXTENSION awa SCHEMA awa;"
    printf "SELECT pgtle.install_extension('awa', %s, %s, %s", value["default_version"], value["comment"], tag
}
index($0, tag) { fail("the script holds " tag) }
{ print }
END { if (!failed) print tag ");" }
function fail(reason) { print "wrap_pgtle: " reason > "/dev/stderr"; failed = 1; exit 1 }
