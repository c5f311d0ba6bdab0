"""The gateway: the front door that takes work in over `nats request hr.api.submit`."""
