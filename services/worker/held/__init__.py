"""Finished weights whose memory outlives the worker: what lies where, and how it is found again."""
