"""What a model wrote → what a client gets: answer, reasoning, tool calls, piece by piece while it is written.

    parsers = find_parsers(template_text, added_tokens={"<tool_call>": 151657, ...})   # once a server
    reader = parsers.start(tools, "auto", reasoning=True, prompt=rendered)             # once a completion
    for text in stream:
        for part in reader.feed(text): ...
    for part in reader.feed("", final=True): ...

However the text is cut into pieces, the parts joined are the same. Nothing is lost: text that turns out not to be a
call comes out as content, as it was written. Only notation is left out: the tags and the words of a call around its
name and arguments, and white space next to tags. White space after a call or a thought is kept between content and
content.

A call's arguments follow its beginning at once, with nothing in between. They are JSON as the model wrote it, or
converted where a notation is not JSON. They are not repaired: a model that writes broken JSON there, or is cut off,
leaves broken arguments, as clients of this API have to expect. A call of a tool that was not offered is passed on, for
the client to refuse; only where no tag surrounds it (plain JSON) it is text.

`choose` finds the parsers of a model; `parts` are what a reader gives; `source` is text in pieces; `reader` separates
thoughts, text and calls; `json_calls`, `section_calls`, `tagged_values`, `gemma4` and `harmony` are notations of calls;
`call_grammar` makes the grammar of a call that must come. Nothing here knows HTTP or tokens.
"""
