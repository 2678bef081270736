"""What lies behind the KV pool: tiers in host memory and on disk, and what moves between them.

`Tiers` owns the thread that copies blocks; `OffloadPolicy` decides which blocks go and come;
`HostTier` and `DiskTier` store them. A runner's `BlockIO` copies between its pool and host memory.

Knows blocks, their hashes and bytes. What decides that a stored block may be used again is in
`fingerprint.py`.
"""
