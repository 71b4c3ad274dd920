service=$(grep -h ' ERROR \[' logs/*.log | sed 's/.*\[\(.*\)\].*/\1/' | sort | uniq -c | sort -rn | awk 'NR == 1 { print $2 }')
errors=$(cat logs/*.log | grep -c " ERROR \[$service\]")
first=$(cat logs/*.log | grep " ERROR \[$service\]" | sort | awk 'NR == 1 { print $1 }')
printf '{"service": "%s", "errors": %s, "first": "%s"}\n' "$service" "$errors" "$first" > answer.json
