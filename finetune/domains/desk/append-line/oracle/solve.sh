echo milk >> list.txt
