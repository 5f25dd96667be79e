"""What the documents show of the studies: tables, pictures, sentences and claims, made of docs/studies/*.json."""
