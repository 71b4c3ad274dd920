echo "hello desk" > note.txt
