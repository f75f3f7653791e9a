"""Health check of a container: `python -IS healthy.py HOST:PORT/PATH...`; exit code 0 when each answers 200.

Bare sockets, since it runs every few seconds in every container: importing an HTTP client costs three times as much.
"""

import socket
import sys

for address in sys.argv[1:]:
    place, _, path = address.partition("/")
    host, _, port = place.rpartition(":")
    with socket.create_connection((host, int(port)), 4) as connection:
        connection.settimeout(4)
        connection.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        if connection.recv(64).split(b" ", 2)[1:2] != [b"200"]:
            sys.exit(f"{address} is not well")
