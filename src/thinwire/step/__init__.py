"""One exchange on all workers or on none: roll call, reduce, commit or take back, costs, scale, checkpoint form.

It may touch core, comm and exchange. It knows neither where gradients come from nor who asked.
"""
