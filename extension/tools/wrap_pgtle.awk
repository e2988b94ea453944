# Prints the call that registers a script with pg_tle: awk -f wrap_pgtle.awk CONTROL SCRIPT. The versions are in the name of
# the script, awa--X.sql or awa--FROM--TO.sql; the comment comes from the control file, whose values are literals as SQL
# has them. The script's text is not changed.
BEGIN { tag = "$_awa_$" }
FNR == NR {
    if (match($0, /^comment = '.*'$/)) comment = substr($0, index($0, "'"))
    next
}
FNR == 1 {
    name = FILENAME
    gsub(/^.*\/|\.sql$/, "", name)
    parts = split(name, version, "--")
    if (!comment) fail("no comment in the control file")
    if (parts == 2) {
        print "-- Registers the extension with pg_tle. Then: CREATE SCHEMA awa; CREATE EXTENSION awa SCHEMA awa;"
        printf "SELECT pgtle.install_extension('awa', '%s', %s, %s", version[2], comment, tag
    } else {
        print "-- Registers an update with pg_tle, where the version before is registered. Then: ALTER EXTENSION awa UPDATE;"
        printf "SELECT pgtle.install_update_path('awa', '%s', '%s', %s", version[2], version[3], tag
    }
}
index($0, tag) { fail("the script holds " tag) }
{ print }
END {
    if (failed) exit 1
    print tag ");"
    if (parts == 3) print "SELECT pgtle.set_default_version('awa', '" version[3] "');"
}
function fail(reason) { print "wrap_pgtle: " reason > "/dev/stderr"; failed = 1; exit 1 }
