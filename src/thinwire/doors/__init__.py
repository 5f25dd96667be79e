"""What users call: `wrap` and `attach` for gradients, `local` for steps apart. Here alone captures and methods meet.

A door checks what it is given, joins the parts, and hands out a handle. It may touch everything before it in the house.
"""
