"""Compare an export with its source, in a process of its own.

The process returns all memory when it ends, which onnxruntime does not do before; a crash in native code ends only this
process; and it loads the folder from disk, as a user does.
"""
