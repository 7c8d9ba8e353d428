"Data of the tasks: generators, readers of published files, vocabularies and batches."
