# The reward is the share of lines of totals.csv that are right; nothing for a wrong header or a line too many.
python3 "$VERIFIER/score.py" "$VERIFIER/totals.csv" totals.csv > "$REWARD_DIR/reward.json"
