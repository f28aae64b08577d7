"""The process that keeps one sandbox: it makes (or joins) the sandbox's namespaces, stays outside its process namespace, and starts, counts
and ends what runs inside. Backends `local` and `bubblewrap` start one each (`polar.runtime.kept`).

Standard library only, and everything is imported before a namespace is joined: it starts in 30 ms, and nothing inside a sandbox, a library
least of all, is ever loaded into it. A package of its own so that starting it imports nothing else of Polar.
"""
