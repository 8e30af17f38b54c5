"""A vLLM prefill node that feeds ESS decode workers: a KV connector for vLLM's v1 engine.

    connector   what vLLM loads by its module path; the only module here that imports vLLM
    settings    what is read of vLLM's own configuration
    requests    in vLLM's scheduler: which requests leave, and what each step makes of them
    departing   in each of vLLM's workers: what is made goes to the decode worker, layer by layer
    outbox      the requests that leave from there: their pages, and the sender of them
    blocks      vLLM's KV cache tensors read as pages of ours
    staging     host memory that pages leave from
    meeting     the small HTTP server by which decode workers meet this worker

It has been built against vLLM's interface as recorded in tests/golden/vllm_connector.json, and
tested on tensors laid out as vLLM lays them out. It has not yet run inside a live vLLM.
docs/vllm.md says how to start it and what vLLM makes differently, docs/adr/0011 why it is so.
"""
