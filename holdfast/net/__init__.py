"""Messages between processes: framing, handshake, connections, clients."""
