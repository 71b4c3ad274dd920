cp report.txt backup.txt
