"""Files and batches of the OpenAI API: jobs of many requests that run on what capacity is left."""
