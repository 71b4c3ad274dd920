{
  echo region,revenue
  awk -F, 'NR > 1 { total[$2] += $3 * $4 } END { for (region in total) printf "%s,%.2f\n", region, total[region] }' sales.csv | sort
} > totals.csv
