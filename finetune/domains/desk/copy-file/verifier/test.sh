# 0: backup.txt is the report that was given, and the report is still there; 1: it is not.
grep -q "stamps are nearly out" report.txt || exit 1
cmp -s "$VERIFIER/report.txt" report.txt || exit 1
cmp -s "$VERIFIER/report.txt" backup.txt || exit 1
exit 0
