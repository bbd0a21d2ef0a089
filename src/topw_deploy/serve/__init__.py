"""An OpenAI-compatible HTTP server around engines. Needs the extra [serve].

options: the checked options.
server: opens the sockets, runs uvicorn, drains at a signal.
connections: closes connections of slow clients.
log_writer: writes the log from a thread.
app: the ASGI application: routes, middleware, error handlers.
service: the opened models and the state of the process: loading, ready, draining.
served: one model and its engine; prompts and runs.
access: request ids, keys, logs.
framing: refuses requests that state their length twice.
bodies: reads and checks a request's body.
schemas: the requests' fields, one module per endpoint.
parameters: fields of a request as parameters of the engine.
failures: errors as OpenAI's error objects.
choices, logprobs: parts of answers.
chat, completions, responses, tokens, status: the endpoints.
events: server-sent events.
metrics: Prometheus metrics.
affinity: which of several servers should read a prompt.
ray: the same server on several machines.
page: the page at `/`.
inspect, inspection, plane: how one token was chosen, for the page.
"""
