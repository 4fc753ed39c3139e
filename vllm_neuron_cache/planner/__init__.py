"""What a deployment needs, computed from a model's configuration files alone: neither torch nor vLLM is imported.

`model` reads the files, `items` the sizes of the media, `tokens` turns sizes into token rows, `plan` computes, `report`
and `plot` show.
"""
