"""A vLLM prefill node that feeds ESS decode workers: a KV connector for vLLM's v1 engine.

    connector   what vLLM loads by its module path; the only module here that imports vLLM
    settings    what is read of vLLM's own configuration
    requests    in vLLM's scheduler: which requests leave, and how far each step brings them
    departing   in each of vLLM's workers: sends rows to the decode worker, layer by layer
    outbox      the requests that leave a worker: their pages, and the sender of these
    blocks      vLLM's KV cache tensors, read as ESS pages
    staging     host memory from which pages are sent
    meeting     the small HTTP server where decode workers exchange metadata with this worker

It was built against vLLM's interface as recorded in tests/golden/vllm_connector.json, and tested on
tensors laid out as vLLM lays them out. It has not yet run inside a live vLLM. docs/vllm.md says how
to start it and what vLLM does differently, docs/adr/0011 why it is built so.
"""
