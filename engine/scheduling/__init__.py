"""Which requests run in the next step, and with how many tokens.

The scheduler makes a `StepPlan`; a runner answers with a `StepResult`; both are plain data
(`plan.py`). A request's progress is written here and nowhere else.

It knows blocks as numbers (`cache/`, `offload/`) and requests as token counts. It never sees a
tensor, a text or a thread.
"""
