"""The names that a job on one host registers its rendezvous with; the stand-in needs none."""


class RendezvousHandler:
    pass


class _Registry:
    def register(self, name, handler):
        pass


RendezvousInfo = RendezvousParameters = RendezvousStoreInfo = object
rendezvous_handler_registry = _Registry()
