"""The mesh: the only room that speaks NATS.

Read `connection`, then `jsapi` and `provision` (what exists), `publisher` (storing), `consumer`
(pulling), `leases` and `settle` (acknowledging), `service` (life cycle), `microservice` (the edge).
Every way in which the broker can fail is handled in one of these files.
"""
