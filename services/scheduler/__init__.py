"""The scheduler: queues, KV blocks, prefix cache and step plans of one engine.

Read ``sequence.py``, ``block_manager.py``, ``batch.py``, ``planner.py`` and ``core.py`` in this
order. None of them has a clock, a socket or a tensor.
"""
