cat > topwords.py <<'END'
import collections
import re
import sys

words = re.findall("[a-z]+", open(sys.argv[1]).read().lower())
counts = collections.Counter(words)
for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]:
    print(word, count)
END
python3 topwords.py sample.txt | cmp - sample.out
