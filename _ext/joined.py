"""Prints by Chromium joined to one PDF that keeps outline, named places, links and tags; pypdf's own merging drops the tags."""
import io
import struct
from pathlib import Path

from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, BooleanObject, DictionaryObject, IndirectObject, NameObject, NumberObject, StreamObject, TextStringObject


def listed(found) -> list:
    "The kids of an element: one or several."
    return [] if found is None else list(found) if isinstance(found, ArrayObject) else [found]


def raw(found: DictionaryObject, key: str):
    "An entry with its reference kept; a list that stands elsewhere is resolved."
    value = found.raw_get(key) if key in found else None
    return value.get_object() if isinstance(value, IndirectObject) and isinstance(value.get_object(), ArrayObject) else value


def shorten(element: IndirectObject, heirs: dict[int, IndirectObject], prefix: str):
    "Chromium makes an element without meaning for each word of code: put its content into the element above. Ids get a prefix."
    mine, kids = element.get_object(), []

    def take(found, page):
        for kid in listed(found):
            below = kid.get_object()
            if isinstance(below, DictionaryObject) and below.get("/S") == "/NonStruct" and "/ID" not in below and len(listed(raw(below, "/K"))) < 2:
                heirs[kid.idnum] = element
                take(raw(below, "/K"), raw(below, "/Pg") or page)
            elif isinstance(below, NumberObject):
                if page is not None and "/Pg" not in mine:
                    mine[NameObject("/Pg")] = page
                here = page is None or page == raw(mine, "/Pg")
                kids.append(below if here else DictionaryObject({NameObject("/Type"): NameObject("/MCR"), NameObject("/Pg"): page, NameObject("/MCID"): below}))
            else:
                if "/S" in below:
                    below[NameObject("/P")] = element
                    shorten(kid, heirs, prefix)
                kids.append(kid)

    take(raw(mine, "/K"), raw(mine, "/Pg"))
    mine[NameObject("/K")] = ArrayObject(kids)
    if "/ID" in mine:
        mine[NameObject("/ID")] = TextStringObject(prefix + str(mine["/ID"]))
    for about in listed(mine.get("/A")):
        about = about.get_object()
        if isinstance(about, DictionaryObject) and "/Headers" in about:
            about[NameObject("/Headers")] = ArrayObject(TextStringObject(prefix + str(id)) for id in about["/Headers"])


def siblings(first):
    "An entry of the outline and those after it."
    while first is not None:
        yield first
        first = first.get_object().raw_get("/Next") if "/Next" in first.get_object() else None


PACKED = 200      # objects compressed at once


def write_small(writer: PdfWriter, target: Path):
    "Write a document with all objects but streams compressed, many at once: tags, links and places make most of a long book."
    out, count, rows = io.BytesIO(), len(writer._objects), {0: (0, 0, 65535)}

    def put(number, one):
        rows[number] = (1, out.tell(), 0)
        out.write(b"%d 0 obj\n" % number)
        one.write_to_stream(out)
        out.write(b"\nendobj\n")

    def stream(data, **entries):
        made = StreamObject()
        made.set_data(data)
        made.update({NameObject(f"/{key}"): value for key, value in entries.items()})
        return made.flate_encode(9)

    out.write(writer.pdf_header.encode() + b"\n%\xe2\xe3\xcf\xd3\n")
    held = [(number, one) for number, one in enumerate(writer._objects, 1) if one is not None]
    for number, one in held:
        if isinstance(one, StreamObject):
            put(number, one)
    small = [(number, one) for number, one in held if not isinstance(one, StreamObject)]
    for start in range(0, len(small), PACKED):
        count, heads, bodies = count + 1, [], io.BytesIO()
        for place, (number, one) in enumerate(small[start:start + PACKED]):
            heads += [number, bodies.tell()]
            one.write_to_stream(bodies)
            bodies.write(b"\n")
            rows[number] = (2, count, place)
        head = " ".join(map(str, heads)).encode() + b"\n"
        put(count, stream(head + bodies.getvalue(), Type=NameObject("/ObjStm"), N=NumberObject(len(heads) // 2), First=NumberObject(len(head))))
    count, begin = count + 1, out.tell()
    rows[count] = (1, begin, 0)
    put(count, stream(b"".join(struct.pack(">BIH", *rows.get(number, (0, 0, 0))) for number in range(count + 1)),
                      Type=NameObject("/XRef"), Size=NumberObject(count + 1), W=ArrayObject(map(NumberObject, (1, 4, 2))),
                      Root=writer.root_object.indirect_reference, Info=writer._info.indirect_reference))
    out.write(b"startxref\n%d\n%%%%EOF\n" % begin)
    Path(target).write_bytes(out.getbuffer())


class Book:
    "The prints joined so far."
    def __init__(self):
        self.writer, self.count = PdfWriter(), 0
        self.writer.pdf_header = "%PDF-1.7"
        self.pages, self.places, self.owners, self.ids = ArrayObject(), DictionaryObject(), ArrayObject(), {}
        self.document, self.tags, self.outline = (self.writer._add_object(DictionaryObject()) for _ in range(3))
        self.document.get_object().update({NameObject("/Type"): NameObject("/StructElem"), NameObject("/S"): NameObject("/Document"),
                                           NameObject("/P"): self.tags, NameObject("/K"): ArrayObject()})
        self.outline.get_object().update({NameObject("/Type"): NameObject("/Outlines"), NameObject("/Count"): NumberObject(0)})

    def append(self, data: bytes, elsewhere: str, below: bool = False):
        "Add a print. Links that begin with `elsewhere` lead to named places of other prints. `below`: its outline goes under the last entry."
        reader, heirs, key = PdfReader(io.BytesIO(data)), {}, len(self.owners)
        root, into, tags = reader.root_object, self.writer, reader.root_object["/StructTreeRoot"]
        top = tags.raw_get("/K")
        del top.get_object()["/P"]
        shorten(top, heirs, f"{self.count}.")
        for page in (page.indirect_reference.get_object() for page in reader.pages):
            del page["/Parent"]
            notes = [note.get_object() for note in page.get("/Annots", ())]
            for found, name in [(page, "/StructParents"), *((note, "/StructParent") for note in notes)]:
                if name in found:
                    found[NameObject(name)] = NumberObject(found[name] + key)
            for note in notes:
                address = note["/A"].get("/URI", "") if "/A" in note else ""
                if address.startswith(elsewhere):
                    note[NameObject("/Dest")] = NameObject("/" + address.removeprefix(elsewhere))
                    del note["/A"]
            self.pages.append(page.indirect_reference.clone(into).indirect_reference)
        top = top.clone(into).indirect_reference
        top.get_object().update({NameObject("/S"): NameObject("/Part"), NameObject("/P"): self.document})
        self.document.get_object()["/K"].append(top)
        owners = list(tags["/ParentTree"]["/Nums"])
        for at, owner in zip(owners[::2], owners[1::2]):
            held = owner.get_object()
            if isinstance(held, ArrayObject):
                new = into._add_object(ArrayObject(heirs.get(getattr(one, "idnum", None), one).clone(into).indirect_reference for one in held))
            else:
                new = heirs.get(owner.idnum, owner).clone(into).indirect_reference
            self.owners.extend([NumberObject(at + key), new])
        for leaf in tags["/IDTree"]["/Kids"] if "/IDTree" in tags else ():
            names = leaf.get_object()["/Names"]
            self.ids |= {f"{self.count}.{id}": ref.clone(into).indirect_reference for id, ref in zip(names[::2], list(names)[1::2])}
        self.places.update(root["/Dests"].clone(into) if "/Dests" in root else {})
        self.hang(root["/Outlines"].clone(into), below)
        self.count += len(reader.pages)
        into.reset_translation(reader)

    def hang(self, outline: DictionaryObject, below: bool):
        "Put the entries of a print's outline after the last entry, or under it."
        mine = self.outline.get_object()
        over = mine["/Last"].indirect_reference if below else self.outline
        entries = list(siblings(outline.raw_get("/First")))
        for entry in entries:
            entry.get_object()[NameObject("/Parent")] = over
        held = over.get_object()
        if "/Last" in held:
            held["/Last"].get_object()[NameObject("/Next")] = entries[0]
            entries[0].get_object()[NameObject("/Prev")] = held["/Last"].indirect_reference
        else:
            held[NameObject("/First")] = entries[0]
        held[NameObject("/Last")] = entries[-1]
        for counted in {id(one): one for one in (mine, held)}.values():
            counted[NameObject("/Count")] = NumberObject(counted.get("/Count", 0) + outline["/Count"])

    def write(self, target: Path, title: str):
        "Write the document."
        root = self.writer.root_object
        pages = root["/Pages"]
        for page in self.pages:
            page.get_object()[NameObject("/Parent")] = pages.indirect_reference
        pages.update({NameObject("/Kids"): self.pages, NameObject("/Count"): NumberObject(self.count)})
        ids = ArrayObject(one for id in sorted(self.ids) for one in (TextStringObject(id), self.ids[id]))
        self.tags.get_object().update({
            NameObject("/Type"): NameObject("/StructTreeRoot"), NameObject("/K"): self.document, NameObject("/ParentTreeNextKey"): NumberObject(len(self.owners)),
            NameObject("/ParentTree"): DictionaryObject({NameObject("/Nums"): self.owners}), NameObject("/IDTree"): DictionaryObject({NameObject("/Names"): ids})})
        root.update({
            NameObject("/Dests"): self.places, NameObject("/Outlines"): self.outline, NameObject("/StructTreeRoot"): self.tags, NameObject("/Lang"): TextStringObject("en"),
            NameObject("/MarkInfo"): DictionaryObject({NameObject("/Marked"): BooleanObject(True)}),
            NameObject("/ViewerPreferences"): DictionaryObject({NameObject("/DisplayDocTitle"): BooleanObject(True)})})
        self.writer.add_metadata({"/Title": title})
        write_small(self.writer, target)
