"The encoders for batches of sentences; `registry.create_encoder` makes one by name."
