"""The OpenAI HTTP API in front of one or more Triton servers.

A stateless process: it translates requests and answers, and speaks to Triton through `inflight_client`.
"""
