"""The inference worker: pulls tasks when its engine has room, runs them, publishes results, then acks."""
