"""A reply as DeepSeek-V3.2 writes it: it reasons, speaks, and calls two tools."""

REASONING = "The tide depends on the moon."
CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="tide">\n'
    '<｜DSML｜parameter name="city" string="true">Bad "Ulm"\nÄ</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
ARGUMENTS = {"city": 'Bad "Ulm"\nÄ', "days": [1, 2]}
"""Of `tide`; `now` has none."""
REPLY = f"{REASONING}</think>Let me look.{CALLS}"
