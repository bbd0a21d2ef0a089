"""The server as a Ray Serve application: a gateway and replicas on any number of machines. Needs the extra [ray].

- application: `build`, which `serve run` calls.
- gateway: receives the HTTP requests and passes each to a replica.
- replica: the server's ASGI application, called without a socket.
- metrics: the server's metrics as Ray's.
- router: chooses the replica by the beginning of the prompt.
"""

from topw_deploy.serve.ray.application import build

__all__ = ["build"]
