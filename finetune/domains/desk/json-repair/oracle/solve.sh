sed -i \
  -e '/^ *\/\//d' \
  -e "s/'eraser'/\"eraser\"/" \
  -e 's/0\.8,}/0.8}/' \
  -e 's/"count": 15 "price"/"count": 15, "price"/' \
  -e 's/1\.25}$/1.25},/' \
  -e 's/None/null/' \
  -e 's/4\.0},$/4.0}/' \
  -e 's/True/true/' inventory.json
echo '}' >> inventory.json
