# Prints SQL scripts with each "\ir path" replaced by that file's text, the path being relative to the file that
# holds the line. Other psql commands are dropped: an extension script may hold none. A missing file is an error. In a
# script called FROM--TO.sql, and in what it includes, "@from_version@" stands for FROM.
function inline(path,    dir, line, word, status) {
    dir = path
    sub(/[^\/]*$/, "", dir)
    while ((status = (getline line < path)) > 0) {
        if (split(line, word, " ") && word[1] == "\\ir") inline(dir word[2])
        else if (line !~ /^[ \t]*\\/) {
            gsub(/@from_version@/, from, line)
            print line
        }
    }
    if (status < 0) { print "inline_includes: cannot read " path > "/dev/stderr"; exit 1 }
    close(path)
}
BEGIN {
    for (i = 1; i < ARGC; i++) {
        from = ARGV[i]
        if (!sub(/--[^\/]*$/, "", from)) from = ""
        sub(/.*\//, "", from)
        inline(ARGV[i])
    }
}
