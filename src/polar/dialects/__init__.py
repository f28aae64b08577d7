"""The providers' wire protocols, one file each. Importing this package registers them all."""

from polar.dialects import anthropic, google, openai_chat, openai_responses  # noqa: F401  (they register themselves)
from polar.dialects.base import Dialect, Encoder, ErrorReply, Operation, Reply, Route, register, registered, replay

__all__ = ["Dialect", "Encoder", "ErrorReply", "Operation", "Reply", "Route", "register", "registered", "replay"]
