"""The ASGI app: keys, routing, budgets, pings, capture. Thin; decides nothing about tokens."""
