"""An OpenAI-compatible HTTP server around engines. Needs the extra [serve].

Process:
- options: the checked options.
- server: opens the socket, runs uvicorn, drains at a signal.
- service: the opened models, and the state of the process: loading, ready, draining or failed.
- connections: closes connections of slow clients.
- log_writer: formats the log's lines and writes them in a thread.
- metrics: Prometheus metrics.

A request, in the order in which it passes:
- app: the ASGI application: routes, middleware, error handlers.
- access: the middleware: request ids, the log's entries, ambiguous lengths, API keys.
- bodies: reads a request's body and checks it against its schema.
- schemas: the requests' fields, one module per endpoint.
- chat, completions, responses, tokens, inspect, status: the endpoints.
- chat_plan, parameters: the fields of a request as parameters of the engine.
- served: one model and its engine.
- run: one request's generation, counted in the log and the metrics.
- choices, output_items: parts of answers.
- events: server-sent events.
- failures: errors as OpenAI's error objects.

Others:
- page: the page at `/`.
- inspection, token_map: what the page shows about one drawn token.
- affinity: which of several servers should read a prompt.
- ray: the same server on several machines.
"""
