sed -i \
  -e 's/^port = .*/port = 8443/' \
  -e 's/^level = .*/level = warning/' \
  -e 's|^file = .*|file = /var/log/desk.log|' service.ini
echo 'retries = 3' >> service.ini
