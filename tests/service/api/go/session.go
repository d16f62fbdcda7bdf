// A session with the client that openapi-generator makes of the OpenAPI document.
package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"log"
	"os"

	"example.com/session/kith"
)

func main() {
	url, gallery, file := os.Args[1], os.Args[2], os.Args[3]
	content, err := os.ReadFile(file)
	check(err)
	photos := []string{base64.StdEncoding.EncodeToString(content)}
	configuration := kith.NewConfiguration()
	configuration.Servers = kith.ServerConfigurations{{URL: url}}
	client, ctx := kith.NewAPIClient(configuration), context.Background()

	_, _, err = client.GalleriesAPI.CreateGallery(ctx).GalleryIn(*kith.NewGalleryIn(gallery)).Execute()
	check(err)
	photo := kith.EnrollIn{Images: photos, Face: kith.PtrString("largest")}
	_, _, err = client.SubjectsAPI.Enroll(ctx, "ada", gallery).EnrollIn(photo).Execute()
	check(err)
	risk := kith.RiskIn{Threshold: *kith.NewNullableFloat32(kith.PtrFloat32(0.5))}
	search := kith.IdentifyIn{Images: photos, Risk: *kith.NewNullableRiskIn(&risk)}
	found, _, err := client.IdentifyAPI.Identify(ctx, gallery).IdentifyIn(search).Execute()
	check(err)
	outcomes := []string{}
	for _, result := range found.Results {
		outcomes = append(outcomes, result.Outcome)
	}

	_, _, err = client.GalleriesAPI.GetGallery(ctx, "absent").Execute()
	var refused *kith.GenericOpenAPIError
	if !errors.As(err, &refused) {
		log.Fatal("the gallery exists")
	}
	var problem struct{ Code string }
	check(json.Unmarshal(refused.Body(), &problem))
	answers := map[string]any{"outcomes": outcomes, "missing": problem.Code}
	check(json.NewEncoder(os.Stdout).Encode(answers))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
