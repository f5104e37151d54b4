"""What runs inside a serving engine during capture: it takes the hidden states of prefills in the worker and writes them into the store.

An engine has an environment of its own, so nothing here imports more than torch, numpy, safetensors and the parts of eyas that need no more
(a test holds them to it). Nothing is installed there either: PYTHONPATH names two folders, this checkout (for ``eyas`` and ``data_prep``)
and ``found/`` beside this file, which holds nothing but the entry point by which SGLang finds its plug-ins. vLLM is told its connector.

In a container these must be mounted at the paths that they have outside: the checkout, readable, and the run's ``output`` folder, writable.

    orders     what a request carries besides its tokens: which row it is, or that all rows are to be on the disk now
    outbox     a thread that writes rows as shards, behind a queue of bounded size
    host_copy  states off the device before the next forward can overwrite them
    sglang_hook, vllm_connector    where the engines hand the states over
"""
