"""KV memory below the device: host memory, local disk and an object store."""
