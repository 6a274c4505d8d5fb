"""The two programs that do the work: the worker injected into every sandbox, and the launcher beside the engine."""
