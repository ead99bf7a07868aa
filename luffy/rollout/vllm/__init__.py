"""vLLM behind the engine protocol: the only place that imports it, and only when an engine is built.

colocated.py   vLLM in our process: sleep, wake, push in place
remote.py      vLLM servers by URL (plain HTTP; vLLM need not be installed here)
dispatch.py    which server gets which request, and server.py, how one is spoken to
requests.py    requests and completions in vLLM's words
transfer.py    weights to servers: a shared folder, or NCCL
worker.py      what runs inside vLLM's workers
serve.py       how a server is started, and guard.py, who may speak to it
"""
