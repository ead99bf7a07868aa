"""vLLM behind the engine protocol: the only place that imports it, and only when an engine is built.

colocated.py         vLLM in our process: sleep, wake, push in place
remote.py            vLLM servers by URL (plain HTTP; vLLM need not be installed here)
dispatch.py          which server gets which request
http_client.py       how one server is called
frozen_servers.py    servers that keep their weights; log-probs of given tokens from them (a teacher)
served_model.py      responses from such servers (the second model of token overrides)
requests.py          requests and completions in vLLM's terms
transfer.py          weights to servers: a shared folder, or NCCL
worker_extension.py  what runs inside vLLM's workers
server_process.py    how a server is started
guard.py             who may call a server
"""
