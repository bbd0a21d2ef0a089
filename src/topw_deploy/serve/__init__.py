"""An OpenAI-compatible HTTP server around engines. Needs the extra [serve].

- server: opens the socket, runs uvicorn, drains at a signal; formats of the log.
- app: the ASGI application: routes, middleware (log, keys), error handlers, and the endpoints that generate nothing.
- service: the checked options, the opened models, and the state of the process: loading, ready, draining or failed.

A request:
- stream: reads its body, runs and counts its generation, and sends the answer, whole or as events.
- chat, completions, responses, inspect: the endpoints.
- schemas, parameters: the requests' fields, and the parameters of the engine among them.
- openapi: the description of the endpoints and of their fields.
- failures: errors as OpenAI's error objects.
- metrics: Prometheus metrics.

Others:
- page: the page at `/`.
- ray: the same server on several machines.
"""
