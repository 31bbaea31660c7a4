"""Lab 00's classic mistakes, each a wrong version and the sentence for the learner who made it."""

from minillm.course.checks import mistake

EXERCISE = {"exercise": "0.1", "name": "kv_bytes_per_token", "check": "known models"}


@mistake(**EXERCISE, says="only one vector a head is counted, but a token leaves two: a key and a value.")
def forgets_the_values(model, bytes_per_element):
    return model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * bytes_per_element


@mistake(
    **EXERCISE,
    says="query heads are counted. Only keys and values are kept, and under grouped-query attention (GQA) several "
    "query heads share one KV head: num_key_value_heads.",
)
def counts_query_heads(model, bytes_per_element):
    return 2 * model["num_hidden_layers"] * model["num_attention_heads"] * model["head_dim"] * bytes_per_element


@mistake(**EXERCISE, says="this is one layer's share. Every layer keeps its own keys and values.")
def forgets_the_layers(model, bytes_per_element):
    return 2 * model["num_key_value_heads"] * model["head_dim"] * bytes_per_element


@mistake(**EXERCISE, says="these are elements, not bytes: an element takes bytes_per_element of them.")
def forgets_the_bytes(model, bytes_per_element):
    return 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]


@mistake(
    **EXERCISE,
    says="the head's width is taken to be hidden_size / num_attention_heads. Often it is, but a config that states "
    "head_dim means it.",
)
def derives_the_head_dim(model, bytes_per_element):
    head_dim = model["hidden_size"] // model["num_attention_heads"]
    return 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * head_dim * bytes_per_element
