"""The providers' wire protocols, one file each. Importing this package registers them all."""

from polar.dialects.base import Dialect, Encoder, ErrorReply, Operation, Reply, Route, register, registered, replay

__all__ = ["Dialect", "Encoder", "ErrorReply", "Operation", "Reply", "Route", "register", "registered", "replay"]
