"""The keeper: KV blocks in shared memory and on disk, which outlive the engines that made them."""
